"""Compares vLLM's connector interface with what the connector was written for.

`compare` is pure. `check_vllm` reads the sources of the installed vLLM, a few files and about 20 ms
of work, when an engine starts. Knows nothing of KVCache.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature

from kvmanager.vllm_connector.versions.interface import (
    OWN_ROOT,
    Interface,
    installed_root,
    known_interfaces,
    minor_of,
)
from kvmanager.vllm_connector.versions.sources import Method, Name, Sources

logger = logging.getLogger("prfaas.kvmanager.connector")

OWN_CLASSES = (
    "kvmanager.vllm_connector.connector.PrfaasConnector",
    "kvmanager.vllm_connector.encode.connector.EmbeddingMetadata",
    "kvmanager.vllm_connector.encode.connector.PrfaasECConnector",
    "kvmanager.vllm_connector.metadata.PrfaasMetadata",
    "kvmanager.vllm_connector.stages.LayoutHandshake",
    "kvmanager.vllm_connector.stats.PrfaasPromMetrics",
    "kvmanager.vllm_connector.stats.TransferStats",
)
"""The classes that derive from vLLM's, so that no other module is read when an engine starts."""

_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class UnsupportedVllmError(RuntimeError):
    """The installed vLLM would call this connector in a way that it does not have."""


@dataclass(frozen=True, slots=True)
class Differences:
    """What differs between two versions of vLLM, a sentence each.

    refusals: the connector cannot work.
    changes: it may work; what vLLM now does otherwise is named.
    """

    refusals: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def compare(
    written_for: Mapping[str, Name], installed: Mapping[str, Name], own: Collection[Name]
) -> Differences:
    """What the base classes of `own` have become since the version that these were written for.

    The mappings have these base classes, with their methods, by full name; others are passed over.
    """
    refusals: list[str] = []
    changes: list[str] = []
    for full_name, was in written_for.items():
        derived = [name for name in own if full_name in name.bases]
        if not derived:
            continue
        overrides = {name: method for found in derived for name, method in found.methods.items()}
        short = full_name.rpartition(".")[2]
        if (found := installed.get(full_name)) is None:
            refusals.append(f"{full_name} is gone")
            continue
        for name in sorted(was.methods.keys() | found.methods.keys()):
            before, after = was.methods.get(name), found.methods.get(name)
            refused, changed = _compare_method(before, after, overrides.get(name))
            refusals += [f"{short}.{name} {text}" for text in refused]
            changes += [f"{short}.{name} {text}" for text in changed]
        gone = set(was.members) - set(found.members)
        changes += [f"{short}.{name} is gone" for name in sorted(gone)]
    return Differences(tuple(refusals), tuple(changes))


def _compare_method(
    before: Method | None, after: Method | None, override: Method | None
) -> tuple[list[str], list[str]]:
    """Refusals and changes, without the method's name. One of `before` and `after` is given."""
    if after is None:
        # vLLM would never call what the connector relies on.
        return (["is gone"], []) if override is not None else ([], ["is gone"])
    refusals: list[str] = []
    changes: list[str] = []
    if override is None:
        if after.abstract and (before is None or not before.abstract):
            refusals.append("must be overridden, and is not")
    else:
        required, optional = _not_taken(after, override)
        refusals += required
        changes += optional
    if before is None and override is None and not refusals:
        # A default that claims a capability was not meant for this connector.
        claim = "" if after.returns in ("None", "False") else f", and returns {after.returns}"
        changes.append(f"({after.parameters}) is new{claim}")
    elif before is not None and not refusals:
        if (before.kind, before.parameters) != (after.kind, after.parameters):
            was = f"{before.kind} ({before.parameters})"
            changes.append(f"is a {after.kind} ({after.parameters}), and was a {was}")
        elif before.returns != after.returns and override is None:
            changes.append(f"returns {after.returns}, and returned {before.returns}")
    return refusals, changes


def _not_taken(base: Method, override: Method) -> tuple[list[str], list[str]]:
    """Calls by `base` that `override` does not take: certain ones, and possible ones."""
    if base.kind != override.kind:
        return [f"is a {base.kind}, and the override a {override.kind}"], []
    ours = Signature(_parameters(override))
    given = [found for found in _parameters(base) if found.kind not in _VARIADIC]
    needed = [found for found in given if found.default is Parameter.empty]
    try:
        _bind(ours, needed)
    except TypeError as error:
        return [f"({base.parameters}) does not fit the override: {error}"], []
    try:
        _bind(ours, given)
        _bind(ours, given, by_name=True)
    except TypeError as error:
        return [], [f"({base.parameters}) may not fit the override: {error}"]
    return [], []


def _bind(signature: Signature, given: Sequence[Parameter], *, by_name: bool = False) -> None:
    """Raise TypeError if a call with these parameters does not fit the signature. `by_name`: all of
    them but `self` or `cls` are given by name if they may be.
    """
    args: list[None] = []
    kwargs: dict[str, None] = {}
    for index, parameter in enumerate(given):
        may_be_named = parameter.kind is not Parameter.POSITIONAL_ONLY and index > 0
        if parameter.kind is Parameter.KEYWORD_ONLY or (by_name and may_be_named):
            kwargs[parameter.name] = None
        else:
            args.append(None)
    signature.bind(*args, **kwargs)


def _parameters(method: Method) -> list[Parameter]:
    node = ast.parse(f"def method({method.parameters}): ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    found = []
    for index, arg in enumerate(positional):
        only = index < len(args.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if only else Parameter.POSITIONAL_OR_KEYWORD
        value = Parameter.empty if index < first_default else ...
        found.append(Parameter(arg.arg, kind, default=value))
    if args.vararg is not None:
        found.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        value = Parameter.empty if default is None else ...
        found.append(Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=value))
    if args.kwarg is not None:
        found.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return found


def lost_members(before: Interface, after: Interface, words: Collection[str]) -> Iterator[str]:
    """Names and members that `after` lacks and whose words this package's code has."""
    for full_name, was in before.names.items():
        found = after.names.get(full_name)
        if found is None:
            yield full_name
            continue
        for member in sorted(set(was.members) - set(found.members)):
            if member in words:
                yield f"{full_name}.{member}"


def nearest(known: Sequence[Interface], version: str) -> Interface:
    """The known version to compare with: the same minor version, or the nearest end of `known`.

    A version without numbers, as that of a build from a checkout, counts as newer than all.
    """
    minor = minor_of(version)
    for interface in known:
        if interface.minor == minor:
            return interface
    return known[0] if (0, 0) < minor < known[0].minor else known[-1]


def verdict(version: str, known: Sequence[Interface], differences: Differences) -> str:
    """What to warn of; empty where there is nothing. Raises UnsupportedVllmError for refusals."""
    oldest, newest = (".".join(map(str, known[index].minor)) for index in (0, -1))
    supported = f"vLLM {oldest}" if oldest == newest else f"vLLM {oldest} to {newest}"
    major, minor = known[-1].minor
    fix = f"install vllm>={oldest},<{major}.{minor + 1}, or a release of PrfaaS for vLLM {version}"
    if differences.refusals:
        raise UnsupportedVllmError(
            f"this PrfaaS was written for {supported} and cannot run in vLLM {version}: "
            f"{'; '.join(differences.refusals)}; {fix}"
        )
    is_known = any(interface.minor == minor_of(version) for interface in known)
    if is_known and not differences.changes:
        return ""
    found = "; ".join(differences.changes) or "its connector interface does not differ"
    return f"this PrfaaS was written for {supported}, and this is vLLM {version}: {found}; {fix}"


def own_classes() -> list[Name]:
    """The classes of `OWN_CLASSES` with their own methods."""
    own = Sources(OWN_ROOT)
    found = (own.name(full_name, with_methods=True) for full_name in OWN_CLASSES)
    return [name for name in found if name is not None]


def base_classes(sources: Sources, own: Collection[Name]) -> dict[str, Name]:
    """The base classes of `own` that are in `sources`, with their methods, by full name."""
    wanted = sorted({base for name in own for base in name.bases})
    found = {base: sources.name(base, with_methods=True) for base in wanted}
    return {base: name for base, name in found.items() if name is not None}


def check_vllm(version: str, *, warns: bool) -> None:
    """Compare the installed vLLM with what the connector was written for, and log what differs
    where `warns`. Raises UnsupportedVllmError where the connector cannot work.
    """
    sources = Sources(installed_root())
    if not sources.has_module("vllm.version"):
        logger.warning("vLLM %s has no sources here: its interface was not compared", version)
        return
    known, own = known_interfaces(), own_classes()
    written_for = nearest(known, version).names
    text = verdict(version, known, compare(written_for, base_classes(sources, own), own))
    if text and warns:
        logger.warning("%s", text)
