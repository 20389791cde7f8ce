"""The region's entry endpoint: one OpenAI API over a local PD cluster and prefill clusters.

A completion takes this way:

    app                     the parts of the gateway, start and stop; `complete` takes the request
    intake/accept           keys, room (`limits`) and body (`inbound`) checked: an `Exchange` begins
    serving/request         `Serving`: plan, admit, open an answer, try once more, relay
    serving/planning        the prompt counted and looked up, and its route
    serving/offload         a request whose KVCache moves: landing, prefill leg, decode leg
    proxy/                  HTTP to engines, and their answers back to the client
    serving/spilling        another PD cluster than the request's home, after a failure
    serving/exchange        what these steps share; it fills the record (`records`)

Beside it:

    links/                  reports of the clusters (`watcher`), state of the links
    cache/                  what is cached where, and prefixes moved and copied
    scheduling/             routes, thresholds, admission, roles, the long-term loop
    members/                instances that join and leave
    sharing/                what several gateways of a region share, and what one keeps in a file
    processes/              several processes of one gateway on one port
    pages, metrics          everything else that is answered
    cli, server, web_app    a process: options and signals, the HTTP server, its applications
    config, file, own_file  its configuration

The gateway does not decide (`scheduler` does), does not queue or place work (the cluster fronts do)
and does not move KVCache (the node agents do).
"""
