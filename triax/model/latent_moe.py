"""Routed experts in a narrow latent space, and shared ones on the full stream."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from triax.config.model import Activation, Moe
from triax.kernels import moe as kernel
from triax.kernels.routed import ExpertWeights
from triax.model.branch import Branch
from triax.model.gated_mlp import GatedMlp
from triax.model.matrix import Blocks, Joins, join, matrix
from triax.model.norm import RMSNorm
from triax.model.precision import at_least_fp32
from triax.model.router import Router, Routing
from triax.model.situ_glu import activation_of


class Experts(nn.Module):
    """Many small gated MLPs, stored as three stacks of matrices; each token goes through those it was routed to."""

    def __init__(self, width: int, moe: Moe, activation: Activation, init_std: float) -> None:
        super().__init__()
        self.activation = activation_of(activation)
        inner = (moe.num_experts, moe.expert_dim, width)
        self.gate = nn.Parameter(torch.empty(inner))
        self.up = nn.Parameter(torch.empty(inner))
        self.down = nn.Parameter(torch.empty(moe.num_experts, width, moe.expert_dim))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=init_std)
        self.rounded: ExpertWeights | None = None
        """Copies of the weights in the format of the products, made once for several forwards; gradients go to the
        weights."""
        self.sums: ExpertWeights | None = None
        """Where gradients of the weights are added, instead of going to their `grad`."""

    def forward(
        self, hidden: Float[Tensor, "T L"], routing: Routing, beside: Float[Tensor, "T L"] | None = None
    ) -> Float[Tensor, "T L"]:
        """Add what each token's experts return, by their shares, and what stands beside them."""
        weights = ExpertWeights(self.gate, self.up, self.down)
        return kernel.experts(
            hidden, routing, weights, self.activation, beside=beside, rounded=self.rounded, sums=self.sums
        )

    def matrices(self) -> Blocks:
        """Return the logical matrices for the optimiser: each expert's own."""
        return {name: (getattr(self, name).shape[1],) for name in ("gate", "up", "down")}


class LatentMoe(Joins):
    """y = W_up RMSNorm(sum_j share_j Expert_j(W_down x)) + Shared(x), the router reading the full x.

    Without a latent width the experts work on x itself and there is neither projection nor norm; with one, the norm
    can be left out by settings. Shared experts are one wider gated MLP.

    Source: K3 report (arXiv 2607.24653) section 2.3, equation 11.
    """

    def __init__(
        self, width: int, moe: Moe, activation: Activation, norm_eps: float = 1e-5, init_std: float = 0.02
    ) -> None:
        super().__init__()
        self.router = Router(width, moe, init_std)
        self.experts = Experts(moe.latent_dim or width, moe, activation, init_std)
        self.latent_down = self.latent_norm = self.latent_up = self.shared = None
        if moe.latent_dim:
            self.latent_down = matrix(width, moe.latent_dim, init_std)
            self.latent_norm = RMSNorm(moe.latent_dim, norm_eps) if moe.latent_norm else None
            self.latent_up = matrix(moe.latent_dim, width, init_std)
        if moe.num_shared_experts:
            self.shared = GatedMlp(width, moe.num_shared_experts * moe.expert_dim, activation, init_std)
        self.latent_rms: Float[Tensor, ""] | None = None
        """Root mean square of the experts' sum before the norm, in the last training forward of a latent layer."""

    def forward(self, hidden: Float[Tensor, "T D"], forced: Routing | None = None) -> Float[Tensor, "T D"]:
        """Transform each token by the experts it is routed to, or by those of a recorded routing."""
        branch, shared = Branch(hidden), None
        if self.shared is not None:
            with branch:
                shared = self.shared(hidden)
        if self.latent_down is None or self.latent_up is None:
            routing = self.router(hidden, forced)
            branch.join()
            return self.experts(hidden, routing, shared)
        logit, latent = self._both(hidden)
        routing = self.router(hidden, forced, logit)
        summed = self.experts(self.latent_down(hidden) if latent is None else latent, routing)
        if self.training and summed.numel():
            self.latent_rms = at_least_fp32(summed.detach()).square().mean().sqrt()
        output = self.latent_up(summed if self.latent_norm is None else self.latent_norm(summed))
        branch.join()
        return output if shared is None else output + shared

    def join(self) -> None:
        """Lay the weights of the router and of the way into the latent end to end, to run as one product."""
        if self.latent_down is not None and self.latent_down.weight.dtype is self.router.weight.dtype:
            self.joined = join([self.router.weight, self.latent_down.weight])

    def _both(self, hidden: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the router's scores before the sigmoid, in fp32, and the latent, where one product makes both."""
        whole = self.whole()
        if whole is None or torch.is_grad_enabled() or hidden.dtype is not whole.dtype:
            return None, None
        if torch.is_autocast_enabled(hidden.device.type):  # which would round the scores
            return None, None
        if hidden.dtype in (torch.float32, torch.float64):
            product = F.linear(hidden, whole)
        elif hidden.is_cuda:
            product = torch.mm(hidden, whole.T, out_dtype=torch.float32)
        else:
            return None, None
        logit, latent = product.split([len(self.router.weight), len(whole) - len(self.router.weight)], dim=1)
        return logit, latent.to(hidden.dtype)

    def matrices(self) -> Blocks:
        """Return the logical matrices for the optimiser; experts and shared experts state their own."""
        blocks: Blocks = {"router.weight": (self.router.weight.shape[0],)}
        if self.latent_down is not None and self.latent_up is not None:
            blocks["latent_down.weight"] = (self.latent_down.out_features,)
            blocks["latent_up.weight"] = (self.latent_up.out_features,)
        return blocks
