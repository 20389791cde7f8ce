"""The region's entry endpoint: one OpenAI API over a local PD cluster and prefill clusters.

    cli, server, file   a process: options, signals, the configuration file
    app                 endpoints, limits, authentication, start and drain
    inbound, exchange   a request: what routing reads of it, what all its steps share
    serving             decide, try, try once more, relay, record
    offload             a request whose KVCache moves: landing, prefill leg, decode leg
    rendering, watcher  what decisions rest on: token ids, reports of the clusters
    proxy/              bytes between engines and clients
    records, metrics    what is kept of a request

It does not decide (`scheduler.routing` does), queue or place work (the cluster fronts do), or move
KVCache (the node agents do).
"""
