"""Muon: momentum whose every logical matrix is orthogonalised before it moves the weights."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from triax.kernels.newton_schulz import orthogonalize, product_dtype

STACK_ELEMENTS = 1 << 26  # numbers orthogonalised at once; bounds the scratch memory of large models


@dataclass(frozen=True)
class Cut:
    """The logical matrices of one shape inside one parameter: rows `start` to `stop` of every period."""

    name: str
    period: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return them as a view [matrices, rows, columns] of the parameter or of a tensor of its shape."""
        return tensor.view(-1, self.period, tensor.shape[-1])[:, self.start : self.stop]


@dataclass
class Muon:
    """Muon over named fp32 parameters; those without a gradient are left alone, decay included.

    average <- momentum average + (1 - momentum) gradient
    ahead   =  momentum average + (1 - momentum) gradient
    weight  <- (1 - lr decay) weight - lr rms sqrt(max(rows, columns)) orthogonal(ahead)

    Rows and columns are those of the logical matrix. An average instead of a sum differs by a factor that the
    orthogonalisation removes.

    Source: Moonlight (arXiv 2502.16982) section 2; per head: K3 report (arXiv 2607.24653) section 2.5.
    """

    parameters: Mapping[str, nn.Parameter]
    """What it moves, each seen as [rows, last dimension]."""
    patterns: Mapping[str, tuple[int, ...]]
    """Row counts of the logical matrices of each parameter, repeated down its rows."""
    lr: float
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled decay, taken with the unscaled learning rate."""
    momentum: float = 0.95
    """Decay of the average."""
    nesterov: bool = True
    """Look ahead by one gradient; otherwise orthogonalise the average itself."""
    rms: float = 0.2
    """Root mean square that an update with equal singular values has."""
    num_steps: int = 5
    """Newton-Schulz iterations."""
    dtype: torch.dtype | None = None
    """Format of the Newton-Schulz products; none leaves the choice to the operation."""
    num_orthogonalized: int = 0
    """Logical matrices orthogonalised since the optimiser was made or loaded."""
    average: dict[str, Tensor] = field(init=False)
    stacks: dict[tuple[int, int], list[Cut]] = field(init=False)
    squares: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.average = {
            name: torch.zeros_like(weight, memory_format=torch.contiguous_format)
            for name, weight in self.parameters.items()
        }
        self.stacks = {}
        for name, weight in self.parameters.items():
            start, period = 0, sum(self.patterns[name])
            for rows in self.patterns[name]:
                cut = Cut(name, period, start, start + rows)
                self.stacks.setdefault((rows, weight.shape[-1]), []).append(cut)
                start += rows

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move the parameters by one step at `rate` times the peak learning rate."""
        pushes = {name: weight.grad for name, weight in self.parameters.items()}
        moving = {name: gradient.contiguous() for name, gradient in pushes.items() if gradient is not None}
        if not moving:
            return
        gradients: list[Tensor] = list(moving.values())
        weights: list[Tensor] = [self.parameters[name] for name in moving]
        averages = [self.average[name] for name in moving]
        torch._foreach_lerp_(averages, gradients, 1 - self.momentum)
        ahead = torch._foreach_lerp(gradients, averages, self.momentum) if self.nesterov else averages
        directions = dict(zip(moving, ahead, strict=True))
        lr = self.lr * rate
        torch._foreach_mul_(weights, 1 - lr * self.weight_decay)
        self.squares = {}
        for shape, cuts in self.stacks.items():
            scale = self.rms * math.sqrt(max(shape))
            for few in _portions([cut for cut in cuts if cut.name in moving], directions):
                self._move(few, directions, lr, scale)

    def _move(self, cuts: list[Cut], directions: Mapping[str, Tensor], lr: float, scale: float) -> None:
        inputs = [cut.of(directions[cut.name]) for cut in cuts]
        sizes = [len(matrices) for matrices in inputs]
        # stacked in the format of the products at once: a copy in fp32 of all that moves would cost a tenth of a step
        stack = inputs[0].new_empty(sum(sizes), *inputs[0].shape[1:], dtype=self.dtype or product_dtype(inputs[0]))
        torch._foreach_copy_(stack.split(sizes), inputs)
        updates = orthogonalize(stack, self.num_steps, self.dtype).split(sizes)
        torch._foreach_add_([cut.of(self.parameters[cut.name]) for cut in cuts], updates, alpha=-lr * scale)
        for cut, norm in zip(cuts, torch._foreach_norm(updates, dtype=self.average[cuts[0].name].dtype), strict=True):
            self.squares[cut.name] = self.squares.get(cut.name, 0) + (scale * norm) ** 2
        self.num_orthogonalized += sum(sizes)

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors of the state, by parameter."""
        return {f"{name}.momentum": average for name, average in self.average.items()}

    def update_rms(self) -> dict[str, float]:
        """Return the root mean square of each parameter's last update, before the learning rate and without decay."""
        return {name: math.sqrt(float(square) / self.average[name].numel()) for name, square in self.squares.items()}


def _portions(cuts: list[Cut], directions: Mapping[str, Tensor]) -> Iterator[list[Cut]]:
    """Split the cuts of one shape so that no portion stacks more than its share of memory, one cut at least."""
    portion: list[Cut] = []
    size = 0
    for cut in cuts:
        more = directions[cut.name].numel() * (cut.stop - cut.start) // cut.period
        if portion and size + more > STACK_ELEMENTS:
            yield portion
            portion, size = [], 0
        portion.append(cut)
        size += more
    if portion:
        yield portion
