"""The gateway's shell around `scheduler`: what is measured and fed to it, and what follows.

    config                         what operators may say: `gateway.scheduling`
    router, thresholds             seconds: a route, t
    snapshots, decode_side         the region that a route is chosen for
    admission                      who is let in
    knowledge, lessons, ledger     what was learnt, by whom, and what is under way
    long_term, region_model        minutes: a new plan of what was measured, and its execution
    roles                          instances that change between prefill and decode
    overview, plan_overview        all of it for operators
    role_pages, collector          roles over HTTP; series for Prometheus

It holds clocks, tasks and metrics; the rules are in `scheduler`. Does not know bodies of requests,
engines or landings.
"""
