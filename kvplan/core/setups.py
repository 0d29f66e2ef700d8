"""Whether two profiles were measured with the same software: what else shaped their figures."""

from kvplan.core.records import Profile


def versions_difference(current: Profile, other: Profile, whose: str = "the baseline has") -> str:
    """Return the first package whose version differs, in words; empty where none does.

    The operating system's build and the last part of Python's version are not compared: they change with every update
    and shape no figure that these profiles hold.
    """
    ours, theirs = _versions(current), _versions(other)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"another version: {name} {ours.get(name, 'none')}, {whose} {theirs.get(name, 'none')}"
    return ""


def _versions(profile: Profile) -> dict[str, str]:
    found = {"kvplan": profile.kvplan_version} | profile.versions
    found.pop("system", None)
    if "python" in found:
        found["python"] = ".".join(found["python"].split(".")[:2])
    return found
