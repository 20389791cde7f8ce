"""The Helm chart of a region, and the same objects with values filled in.

Both are made of one description of each object: in a template an expression stands where the object
has a value of the chart. So no object is described twice, and the chart has no logic but "this host
is here" and "this operator is there".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.region.kubernetes.manifests import Keys, Manifest, Object, Value
from deploy.region.kubernetes.network import policies, services
from deploy.region.kubernetes.operators import certificates, monitors, scalers
from deploy.region.kubernetes.pods import Pod, object_name, pods_of
from deploy.region.kubernetes.values import (
    NAMED,
    VERSION,
    ChartValues,
    chart_schema,
    default_values,
    site_values,
)
from deploy.region.kubernetes.workloads import workloads
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.problems import FileError, Problem, suggestion
from kvmanager.config_files.yaml_files import parse_yaml, read_text, read_values

_TAG: Final = "!value"
# No text is written like this: YAML quotes one that begins with a tag, and lines of JSON do not end
# with this quote.
_LINE: Final = re.compile(rf"^(?P<head>.*?){_TAG} '(?P<path>\[\".*\"\])'$")
_NOTES: Final = """\
Region {region}: `prfaas region render` wrote this chart from its region file. Hosts that run here:
{{{{- range $name, $host := .Values.hosts }}}}
{{{{- if $host.enabled }}}} {{{{ $name }}}}{{{{ end }}}}
{{{{- end }}}}
Machines need the labels of `nodeSelector`, and the Secrets must exist: docs/kubernetes.md.
Hosts in other Kubernetes clusters are let in only if networkPolicies.agentsElsewhere and
networkPolicies.gatewaysElsewhere name them; until then no KVCache comes from there.
"""


class _Expression(str):
    """Stands for a value of the chart; its text is the path of the value, as JSON."""


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and expressions with a tag of their own."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _expression(*path: str) -> _Expression:
    return _Expression(json.dumps(path, separators=(",", ":")))


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_expression(dumper: yaml.SafeDumper, path: _Expression) -> yaml.ScalarNode:
    return dumper.represent_scalar(_TAG, str(path))


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(_Expression, _represent_expression)


def rendered(region: RegionSpec, values: ChartValues | None = None) -> list[Object]:
    """The objects of the region, as Helm makes them of its chart with these values. FileError."""
    pods = pods_of(region)
    given = (values or default_values(region, pods)).model_dump(mode="json", by_alias=True)

    def value(*path: str) -> Any:
        found: Any = given
        for key in path:
            found = found[key]
        return found

    return [
        item.body
        for item in _manifests(region, pods, value)
        if all(any(value(*path) for path in either) for either in item.when)
    ]


def kustomization(region: RegionSpec, values: ChartValues) -> dict[str, str]:
    """The objects of `rendered` as files for kubectl, by their names. FileError."""
    texts = {
        f"{body['kind'].lower()}-{body['metadata']['name']}.yaml": _yaml(body)
        for body in rendered(region, values)
    }
    listed = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(texts),
    }
    return texts | {"kustomization.yaml": _yaml(listed)}


def chosen_values(region: RegionSpec, site: str | None, file: Path | None) -> ChartValues:
    """The default values, with those of a site and of a file over them, as Helm merges them.
    FileError, OSError.
    """
    values = default_values(region, pods_of(region))
    document = values.model_dump(mode="json", by_alias=True)
    if site is not None:
        document = _merged(document, site_values(region, site))
    if file is None:
        return ChartValues.model_validate(document)
    given = read_values(read_text(file), str(file)) or {}
    # As JSON, in which every text stays a text.
    text = json.dumps(_merged(document, given), ensure_ascii=False, default=str)
    try:
        found = parse_yaml(text, ChartValues, source=str(file), expected="values are a mapping")
    except FileError as error:
        # Lines of what was merged are not those of the file.
        problems = [replace(item, line=None) for item in error.problems]
        raise FileError(str(file), problems) from error
    unknown = [
        Problem((name, key), f"the region has no {key!r}{suggestion(key, getattr(values, name))}")
        for name in NAMED
        for key in getattr(found, name)
        if key not in getattr(values, name)
    ]
    if unknown:
        raise FileError(str(file), unknown)
    return found


def _merged(below: object, above: object) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    both = {key: _merged(below.get(key), item) for key, item in above.items()}
    # As Helm does: `null` takes away what is below.
    return {key: item for key, item in (below | both).items() if above.get(key, item) is not None}


def chart(region: RegionSpec) -> dict[str, str]:
    """The files of the region's chart, by their paths. FileError."""
    pods = pods_of(region)
    values = default_values(region, pods)
    templates: dict[str, list[str]] = {}
    for item in _manifests(region, pods, _expression):
        templates.setdefault(item.template, []).append(_template(item))
    files = {f"templates/{name}": "".join(texts) for name, texts in templates.items()}
    files["templates/NOTES.txt"] = _NOTES.format(region=region.name)
    files["Chart.yaml"] = _yaml(_chart_file(region))
    files["values.yaml"] = _yaml(values.model_dump(mode="json", by_alias=True))
    files["values.schema.json"] = json.dumps(chart_schema(values), indent=1) + "\n"
    for cluster in region.clusters:
        files[f"values-{cluster.name}.yaml"] = _yaml(site_values(region, cluster.name))
    return files


def _chart_file(region: RegionSpec) -> Mapping[str, str]:
    return {
        "apiVersion": "v2",
        "name": object_name(region.name),
        "description": f"PrfaaS region {region.name}, written by prfaas region render",
        "type": "application",
        "version": VERSION,
        "appVersion": VERSION,
    }


def _manifests(region: RegionSpec, pods: Sequence[Pod], value: Value) -> Iterator[Manifest]:
    parts = (workloads, services, policies, certificates, monitors, scalers)
    return chain.from_iterable(part(region, pods, value) for part in parts)


def _template(item: Manifest) -> str:
    # What the region file says is text, also where it looks like a template.
    text = _yaml(item.body).replace("{{", '{{ "{{" }}')
    text = "".join(map(_filled, text.splitlines(keepends=True)))
    conditions = [_either(paths) for paths in item.when]
    condition = _joined("and", conditions)
    return f"{{{{- if {condition} }}}}\n---\n{text}{{{{- end }}}}\n"


def _filled(line: str) -> str:
    """A line in which an expression takes the place of the path of a value."""
    match = _LINE.match(line.rstrip("\n"))
    if match is None:
        return line
    path = tuple(json.loads(match["path"]))
    return f"{match['head']}{{{{ {_index(path)} | toJson }}}}\n"


def _either(paths: Sequence[Keys]) -> str:
    return _joined("or", list(dict.fromkeys(map(_index, paths))))


def _joined(word: str, terms: Sequence[str]) -> str:
    return terms[0] if len(terms) == 1 else " ".join([word, *(f"({term})" for term in terms)])


def _index(path: Keys) -> str:
    return f"index .Values {' '.join(map(json.dumps, path))}"


def _yaml(value: object) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
