"""What a request asks of K3 beside its messages, from the fields of an OpenAI-shaped request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from triax.data.chat.tool import Tool, check_tools
from triax.errors import DataError

EFFORTS = ("low", "high", "max")
NEAREST_EFFORT = {"minimal": "low", "medium": "high", "xhigh": "max"}
DEFAULT_EFFORT = "max"
CHOICES = ("auto", "required", "none")
FORMATS = ("text", "json_object", "json_schema")
KEEPS = ("all",)
THINKING_FIELDS = ("type", "keep", "effort")


@dataclass(frozen=True)
class Options:
    """Global and one-shot options of a K3 prompt.

    Raises:
        DataError: An option has a value that K3 does not know.
    """

    tools: Sequence[Tool] = ()
    thinking: bool = True
    """Whether the model reasons first; past reasoning is shown only then."""
    effort: str | None = None
    """How much to think: low, high or max; None says nothing to the model."""
    keep: Literal["last", "all"] = "all"
    """Earlier reasoning shown again; K3 knows `all` only, K2 also what follows the last answer without calls."""
    tool_choice: str = "auto"
    """auto, required or none."""
    response_format: Mapping[str, Any] | None = None
    """`{"type": "json_object"}`, or json_schema with its schema."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", check_tools(self.tools))
        _check_effort(self.effort)
        _check_choice(self.tool_choice)
        _check_format(self.response_format)

    @property
    def schema(self) -> Any:
        """JSON schema that the answer must follow, None where it is free."""
        if self.response_format is None or self.response_format.get("type") != "json_schema":
            return None
        return _schema(self.response_format["json_schema"])


def request_options(request: Mapping[str, Any], keeps: Sequence[str] = KEEPS) -> Options:
    """Read the options of a chat request.

    `thinking.type`, `enable_thinking`, or `reasoning_effort` none switch thinking off, the first that is given
    decides; `thinking.effort` goes before `thinking_effort` and this before `reasoning_effort`; without any the effort
    is max. `thinking.keep` goes before `preserve_thinking`, whose true means all; neither matters without thinking.

    Args:
        request: The fields.
        keeps: What the model can show of earlier reasoning, by default first: `last` or `all`.

    Raises:
        DataError: A field has a value that the model does not know.
    """
    thinking = request.get("thinking")
    if isinstance(thinking, bool) or thinking is None:
        thinking = {} if thinking is None else {"type": "enabled" if thinking else "disabled"}
    if not isinstance(thinking, Mapping) or (strange := set(thinking) - set(THINKING_FIELDS)):
        found = sorted(strange) if isinstance(thinking, Mapping) else thinking
        raise DataError(f"thinking: must be an object of type, keep and effort; found `{found}`; leave it out")
    if (kind := thinking.get("type", "enabled")) not in ("enabled", "disabled"):
        raise DataError(f"thinking.type: not a mode; found `{kind!r}`; use enabled or disabled")
    efforts = {
        "thinking.effort": thinking.get("effort"),
        "thinking_effort": request.get("thinking_effort"),
        "reasoning_effort": request.get("reasoning_effort"),
    }
    where, effort = next(((name, value) for name, value in efforts.items() if value), ("reasoning_effort", None))
    if "type" in thinking:
        on = kind == "enabled"
    elif request.get("enable_thinking") is not None:
        on = bool(request["enable_thinking"])
    else:
        on = effort != "none"
    return Options(
        tools=check_tools(request.get("tools")),
        thinking=on,
        effort=_check_effort(DEFAULT_EFFORT if effort in (None, "none") else effort, where) if on else None,
        keep=_keep(thinking.get("keep"), request.get("preserve_thinking"), keeps) if on else "all",
        tool_choice=_check_choice(request.get("tool_choice") or "auto"),
        response_format=_check_format(request.get("response_format")),
    )


def _keep(keep: object, preserve: object, keeps: Sequence[str]) -> Literal["last", "all"]:
    name = "thinking.keep"
    if not keep and preserve is not None:
        name, keep = "preserve_thinking", "all" if preserve else "last"
    chosen = keep or keeps[0]
    if chosen == "last" and chosen in keeps:
        return "last"
    if chosen == "all":
        return "all"
    asked = keep if name == "thinking.keep" else preserve
    if keeps == KEEPS:
        raise DataError(f"{name}: K3 keeps all earlier reasoning; found `{asked!r}`; use all or leave it out")
    raise DataError(f"{name}: not known; found `{asked!r}`; use {' or '.join(keeps)}")


def _check_effort(effort: object, where: str = "reasoning_effort") -> str | None:
    if effort is None or (isinstance(effort, str) and effort in EFFORTS):
        return effort
    nearest = NEAREST_EFFORT.get(str(effort))
    raise DataError(
        f"{where}: not supported; found `{effort}`; use "
        + (f"{nearest}, the nearest of low, high and max" if nearest else "low, high or max")
    )


def _check_choice(choice: object) -> str:
    if isinstance(choice, str) and choice in CHOICES:
        return choice
    raise DataError(f"tool_choice: K3 has no such choice; found `{choice!r}`; use auto, required or none")


def _check_format(form: object) -> Mapping[str, Any] | None:
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else form
    if not isinstance(form, Mapping) or kind not in FORMATS:
        raise DataError(f"response_format.type: not a format; found `{kind!r}`; use text, json_object or json_schema")
    if kind == "json_schema":
        wrapper = form.get("json_schema")
        if not isinstance(wrapper, Mapping) or not isinstance(_schema(wrapper), Mapping):
            raise DataError(
                f"response_format.json_schema: no schema; found `{wrapper!r}`; give json_schema.schema as an object"
            )
    return form


def _schema(wrapper: Mapping[str, Any]) -> Any:
    return wrapper.get("schema", wrapper.get("json_schema", wrapper))
