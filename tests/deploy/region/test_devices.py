"""GPUs and cores of a host, divided among its engines."""

from __future__ import annotations

from pathlib import Path

from deploy.region.launch.devices import (
    Division,
    cores_here,
    divided,
    divided_for,
    divided_here,
    gpus_here,
)
from deploy.region.launch.parts import part_of
from deploy.region.launch.plan import Planner
from deploy.region.launch.ports import resolve_part
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.loading import parse_region
from deploy.region.spec.region import RegionSpec


def region_of(model: str, *instances: str) -> RegionSpec:
    return parse_region(
        f"""
models: [{{name: m, path: org/m, {model}}}]
clusters:
  - {{name: home, kind: pd, nodes: [{{name: b1, instances: [{", ".join(instances)}]}}]}}
""",
        {},
    )


def parts(region: RegionSpec, *, gpus: str = "", cores: int = 0) -> Division:
    return divided(region, region.nodes, gpus=list(gpus), cores=list(range(cores)))


def test_gpus_go_to_engines_in_order() -> None:
    region = region_of("tensor_parallel_size: 2", "{name: p}", "{name: d}")
    assert parts(region, gpus="0123") == Division(
        {"p": {"CUDA_VISIBLE_DEVICES": "0,1"}, "d": {"CUDA_VISIBLE_DEVICES": "2,3"}}
    )


def test_each_pipeline_stage_has_gpus_or_cores_of_its_own() -> None:
    stages = "pipeline_parallel_size: 3"
    region = region_of("tensor_parallel_size: 2", f"{{name: p, {stages}}}", "{name: d}")
    assert parts(region, gpus="01234567").environment == {
        "p": {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"},
        "d": {"CUDA_VISIBLE_DEVICES": "6,7"},
    }
    on_cpu = region_of(
        f"kv_space_gib: 1, {stages}", "{name: p}", "{name: d, tensor_parallel_size: 2}"
    )
    found = parts(on_cpu, cores=9).environment
    assert found["p"] == {"VLLM_CPU_OMP_THREADS_BIND": "0|1|2"}
    assert found["d"] == {"VLLM_CPU_OMP_THREADS_BIND": "3|4|5|6|7|8"}


def test_gpus_that_the_file_gives_away_are_left_to_it() -> None:
    region = region_of("dtype: auto", "{name: p}", '{name: d, env: {CUDA_VISIBLE_DEVICES: "0"}}')
    found = parts(region, gpus="012")
    assert found.environment == {"p": {"CUDA_VISIBLE_DEVICES": "1"}}


def test_too_few_gpus_are_assigned_to_nobody() -> None:
    region = region_of("tensor_parallel_size: 2", "{name: p}", "{name: d}")
    found = parts(region, gpus="012")
    assert found.environment == {}
    assert found.notes == (
        "2 engines want 4 GPUs and 3 are free: none is assigned; give CUDA_VISIBLE_DEVICES in env",
    )
    assert parts(region) == Division()


def test_engines_on_the_cpu_have_cores_of_their_own() -> None:
    region = region_of("kv_space_gib: 1", "{name: p}", "{name: d}")
    assert parts(region, cores=5, gpus="01").environment == {
        "p": {"VLLM_CPU_OMP_THREADS_BIND": "0,1"},
        "d": {"VLLM_CPU_OMP_THREADS_BIND": "2,3"},
    }
    wide = region_of("kv_space_gib: 1, tensor_parallel_size: 2", "{name: p}")
    assert parts(wide, cores=4).environment == {"p": {"VLLM_CPU_OMP_THREADS_BIND": "0,1|2,3"}}


def test_engines_share_cores_where_there_are_too_few_or_one_binds_itself() -> None:
    region = region_of("kv_space_gib: 1", "{name: p}", "{name: d}", "{name: e}")
    found = parts(region, cores=2)
    bound = {name: told["VLLM_CPU_OMP_THREADS_BIND"] for name, told in found.environment.items()}
    assert bound == {"p": "0", "d": "1", "e": "0"}
    assert found.notes == ("3 workers of engines have 2 CPU cores to share",)
    own = region_of(
        "kv_space_gib: 1", "{name: p}", '{name: d, env: {VLLM_CPU_OMP_THREADS_BIND: "0"}}'
    )
    assert parts(own, cores=4) == Division()


def test_what_an_engine_has_got_is_in_its_environment_unless_the_file_says_it() -> None:
    region = region_of("kv_space_gib: 1, env: {A: '1'}", "{name: p}", "{name: d}")
    directory = RunDirectory(Path("/run/r"), Path("/run/r"))
    devices = {"p": {"VLLM_CPU_OMP_THREADS_BIND": "0,1", "A": "2"}}
    planner = Planner(resolve_part(region, part_of(region)), directory, {}, devices)
    told = {item.name: item.process.env for item in planner.processes() if item.kind == "engine"}
    assert (told["p"]["VLLM_CPU_OMP_THREADS_BIND"], told["p"]["A"]) == ("0,1", "1")
    assert told["d"]["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def with_another_node(region: RegionSpec) -> RegionSpec:
    """The region with a node b2 on the same machine, which has the engine d."""
    (cluster,) = region.clusters
    other = cluster.nodes[0].model_copy(
        update={"name": "b2", "instances": region_of("dtype: auto", "{name: d}").nodes[0].instances}
    )
    cluster = cluster.model_copy(update={"nodes": (*cluster.nodes, other)})
    return region.model_copy(update={"clusters": (cluster,)})


def test_parts_of_one_machine_divide_it_alike() -> None:
    region = with_another_node(region_of("dtype: auto", "{name: p}"))
    gpus = {"CUDA_VISIBLE_DEVICES": "4,5"}
    for node, instance, gpu in (("b1", "p", "4"), ("b2", "d", "5")):
        found = divided_here(region, part_of(region, node=node), gpus)
        assert found.environment == {instance: {"CUDA_VISIBLE_DEVICES": gpu}}


def test_an_engine_that_joins_gets_no_gpu_that_another_has() -> None:
    instances = "{name: p}", '{name: q, env: {CUDA_VISIBLE_DEVICES: "6"}}'
    before = with_another_node(region_of("dtype: auto", *instances))
    after = with_another_node(region_of("dtype: auto", *instances, "{name: n}"))
    gpus = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    running = divided_here(before, part_of(before, node="b1"), gpus)
    assert running.environment == {"p": {"CUDA_VISIBLE_DEVICES": "4"}}
    found = divided_for(after, part_of(after, node="b1"), gpus, running)
    assert found.environment == running.environment | {"n": {"CUDA_VISIBLE_DEVICES": "7"}}
    # The other part has 5, and the file gives 6 away.
    nothing = divided_for(
        after, part_of(after, node="b1"), {"CUDA_VISIBLE_DEVICES": "4,5,6"}, running
    )
    assert nothing.environment == running.environment


def test_this_machine() -> None:
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "2,GPU-5,"}) == ["2", "GPU-5"]
    assert gpus_here({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert all(name.isdigit() for name in gpus_here({}))
    assert cores_here() == sorted(set(cores_here()))
