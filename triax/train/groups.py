"""Parameters by what they belong to, for norms that say where a run goes wrong."""

from triax.config.model import Model


def group_of(name: str, settings: Model) -> str:
    """Return the group of a parameter of the decoder, by its name."""
    parts = name.split(".")
    if parts[0] in ("multi_token", "vision"):
        return parts[0]
    if any(part.endswith("_mix") for part in parts):
        return "residual_mix"
    if "norm" in parts[-1] or (len(parts) > 1 and "norm" in parts[-2]):
        return "norms"
    if parts[0] != "layers":
        return parts[0]
    if parts[2] == "attention":
        return "attention" if settings.is_mla(int(parts[1])) else "kda"
    if parts[2] != "mlp" or len(parts) < 5:
        return parts[2]  # of a layer that is not ours
    part = parts[3]
    if part in ("router", "experts", "shared"):
        return part
    return "latent" if part.startswith("latent") else "dense"
