"""The version of the weights that answered, as backends report it."""

from agl.dialects._foreign import as_dict, as_list


def version_of(model_version: object, *spans: object) -> str:
    """The version that a body names, ``""`` if it names none.

    Args:
        model_version: A text or a number, or ``None``.
        spans: Lists of ``{"version": ..., "start": ..., "end": ...}`` (``model_versions`` of agl's policy server,
            ``weight_versions`` of vLLM); an answer that crossed a weight update lists several, joined with ``+``.
    """
    for listed in spans:
        names = [_name(item) for item in as_list(listed)]
        if unique := list(dict.fromkeys(name for name in names if name)):
            return "+".join(unique)
    return str(model_version) if isinstance(model_version, str | int) else ""


def _name(item: object) -> str:
    value = as_dict(item).get("version", item)
    return str(value) if isinstance(value, str | int) else ""
