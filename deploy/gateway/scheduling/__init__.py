"""The gateway's shell around `scheduler`: what is measured and fed to it, and what follows.

    config                         what operators may say: `gateway.scheduling`
    scheduler                      hands facts and questions to `scheduler.live.core`
    admission                      who is let in, as answers and series
    feedback                       what each step of a request's life teaches
    long_term                      minutes: new plans of what was measured, and their execution
    roles                          instances that change between prefill and decode
    overview, plan_overview        all of it for operators
    role_pages, collector          roles over HTTP; series for Prometheus

It holds clocks, tasks and metrics; the rules are in `scheduler`. This package does not know bodies
of requests, engines or landings.
"""
