"""The learning rate of a run whose length or schedule was changed on the way, told before the run goes on."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from triax.config.train import Recipe
from triax.optim.schedule import rate

TOLD_FROM = 0.01
"""Share of the peak by which a rate has to differ from the one that was planned."""


def rate_change(saved: Mapping[str, Any], recipe: Recipe, tokens: int) -> str:
    """Say where the next step's rate is not the one that the checkpoint's own settings plan; nothing where it is.

    The schedule is a function of the share of the planned tokens, so more tokens stretch it, and a run that had
    decayed goes on with a rate of its middle.

    Args:
        saved: Settings that the checkpoint was written with.
        recipe: Settings to go on with.
        tokens: Tokens read so far.
    """
    try:
        before = Recipe.model_validate({k: v for k, v in saved.items() if k in Recipe.model_fields})
    except ValidationError:  # of another version of triax
        return ""
    last, planned = _rate(before, tokens - before.train.batch_tokens / 2), _rate(before, tokens + _half(before))
    following = _rate(recipe, tokens + _half(recipe))
    if not tokens or abs(following - planned) <= TOLD_FROM * recipe.optim.lr:
        return ""
    why = []
    if before.train.tokens != recipe.train.tokens:
        why.append(
            f"train.tokens was `{before.train.tokens}`, is `{recipe.train.tokens}`, which stretches the schedule"
        )
    if before.schedule != recipe.schedule:
        why.append("the schedule was changed")
    return (
        f"warning: the learning rate was {last:.3g} at the last step and is {following:.3g} at the next"
        + (f": {' and '.join(why)}" if why else "")
        + "; to decide it yourself give `schedule.segments`, whose `until` is a share of train.tokens"
    )


def _half(recipe: Recipe) -> float:
    return recipe.train.batch_tokens / 2


def _rate(recipe: Recipe, tokens: float) -> float:
    return recipe.optim.lr * rate(recipe.schedule, min(1.0, max(0.0, tokens / recipe.train.tokens)))
