"""The region's entry endpoint: one OpenAI API over a local PD cluster and prefill clusters.

    cli, server, file       a process: options, signals, the configuration file
    app                     the parts, start and stop, completions, errors
    intake, limits, auth    who may come in: keys, tenants, room, bodies
    inbound, exchange       a request: what routing reads of it, what all its steps share
    planning                its prompt counted and looked up, and its route
    serving                 try, try once more, relay, record
    offload                 a request whose KVCache moves: landing, prefill leg, decode leg
    proxy/                  bytes between engines and clients
    rendering, watcher      what decisions rest on: token ids, reports of the clusters
    links                   the same of links, as node agents see them
    cached, caches          what of a prompt is cached where
    cache_upkeep            cached prefixes moved and copied: cache_moves, rebalancing
    scheduling/             routes, thresholds, admission, roles, the long-term loop
    pages, models           everything else that is answered: models, health, what operators ask
    cache_pages, cache_api  the part of it under /prfaas/cache
    records, metrics        what is kept of a request

It does not decide (`scheduler` does), queue or place work (the cluster fronts do), or move KVCache
(the node agents do).
"""
