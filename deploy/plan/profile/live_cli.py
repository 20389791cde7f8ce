"""`prfaas plan profile-live`: the profile of engines from what a region has just served.

The command imports what it needs when it runs, so that its help appears at once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from deploy.command_line import GatewayOption, JsonOption, KeyOption, RunDirOption
from deploy.plan.profile.ends import Ends, kv_cache_size

_NUM_RECORDS: Final = 1000
"""As many as a gateway hands out."""


def profile_live_command(
    instance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="an instance whose requests count; may be repeated; default: all. Needed where "
            "instances have unlike hardware",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="served model; not needed if there is one")] = "",
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    config: Annotated[
        Path | None,
        typer.Option(help="the model's Hugging Face config.json: adds KVCache sizes to the file"),
    ] = None,
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("profile.yaml"),
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a profile of the requests that a region has just served, for `prfaas plan solve`.

    It needs traffic and no idle engine. Engines at work are slower than `prfaas plan profile` finds
    one alone: prompts share their steps, and other processes share their hosts. The last requests
    that a gateway keeps show what was left. Ask while the region is as busy as it is to be planned
    for: notes name instances that were idle for long.

    \b
    prfaas plan profile-live
    prfaas plan profile-live --instance a1-prefill --instance b1-decode --out loaded.yaml
    """
    from deploy.gateway.serving.records import RequestRecord
    from deploy.plan.profile.served import TooFewRequests, served_profile
    from deploy.profile_file import EngineProfile, EngineProfileFile, Provenance
    from deploy.region import client

    ends = Ends(out, as_json)
    ends.check_target(force)
    kv_cache = kv_cache_size(config, ends)
    url, key = client.find_pages(gateway, run_dir, api_key)
    path = f"/prfaas/requests?limit={_NUM_RECORDS}"
    records = client.ask(url, path, dict[str, list[RequestRecord]], key=key)["requests"]
    try:
        served = served_profile(records, model, instance or ())
    except TooFewRequests as error:
        ends.fail(str(error), 1)
    names = ", ".join(sorted(served.busy))
    provenance = Provenance(
        url=url,
        model=model or next(record.model for record in records if record.outcome == "ok"),
        date=datetime.now(UTC).replace(microsecond=0),
        repeats=min(point.samples or 1 for point in served.prefill.points),
        notes=(
            f"of {served.num_prompts} prompts that {names} prefilled beside other work",
            *served.notes,
        ),
    )
    profile = EngineProfile(
        prefill=served.prefill, decode=served.decode, kv_cache=kv_cache, provenance=provenance
    )
    file = EngineProfileFile(profile=profile)
    ends.write(file)
    ends.show(file)
