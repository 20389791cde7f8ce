"""One example of each command with what it printed, which ends the command's `--help`.

The outputs are those of runs on one machine: addresses, times and counts are others elsewhere.
`...` stands for what was left out.
"""

from __future__ import annotations

from typing import Final

EXAMPLES: Final[dict[str, str]] = {
    "up": """\
$ prfaas up demo.yaml --json
...
{"event": "progress", "name": "gateway", "kind": "gateway", "state": "healthy", ...}
{"event": "ready", "gateway": "http://127.0.0.1:8000", ...}""",
    "status": """\
$ prfaas status demo
region demo  running  http://127.0.0.1:8000
process                    kind     state      up     memory  restarts  address
-------------------------------------------------------------------------------------
link.prefill-a-to-pd-b.b1  relay    healthy  63 s   55.3 MiB            127.0.0.1:25749
agent.a1                   agent    healthy  63 s  623.0 MiB            127.0.0.1:29693
a1-prefill                 engine   healthy  61 s    3.4 GiB            http://127.0.0.1:28657
...""",
    "down": """\
$ prfaas down demo
region demo is down""",
    "doctor link": """\
$ prfaas doctor link prefill-a pd-b
a1 → b1  data port 127.0.0.1:25749
...
loss                0.000% of the bytes sent again
congestion control  reno in use; bbr is allowed, which is for links to other hosts
...""",
    "doctor region": """\
$ prfaas doctor region demo.yaml
region demo, seen from this host, which runs all of it
ok      files of this host: those that the region file names are there
ok      agent a1, control: 127.0.0.1:29693: reachable
...
ok      weights and layouts: the same for all engines of demo
...""",
    "cache explain": """\
$ prfaas cache explain prompt.json
2,200 tokens, 8 full blocks of 256
...
now: prefill_cluster prefill-a: above_threshold; prompt_tokens=2200""",
    "cache ls": """\
$ prfaas cache ls
                                                           looked up
cluster    node  blocks         kv   windows  states  ssd     tokens  hits  age
-------------------------------------------------------------------------------
pd-b       b1       553  138.2 MiB  19.0 MiB       0    0      9,216    0%  3 s
prefill-a  a1       470  117.5 MiB  13.5 MiB       0    0     32,832    0%  3 s""",
    "cache top": """\
$ prfaas cache top --limit 2
prefix        tokens  resumable  branch  hits  idle     arena  ssd  held by
--------------------------------------------------------------------------------
0387eca50af8     256        256             0  15 s   2.5 MiB    0  prefill-a/a1
417757e65499   4,096      4,096             0  14 s  17.5 MiB    0  prefill-a/a1""",
    "clusters": """\
$ prfaas clusters
cluster    kind     state      queue  running  instances
--------------------------------------------------------
pd-b       pd       healthy        0        0     2 of 2
prefill-a  prefill  healthy  0 of 64        0     1 of 1
...
0 requests in flight; admitted 12""",
    "requests": """\
$ prfaas requests --limit 1
request       age  outcome  went to    reason           prompt  cached  ttft, s  parts
-------------------------------------------------------------------------------------
1fc1ec8394f3  3 s  ok       prefill-a  above_threshold   1,500       0    0.325  bqqqqppppppttddd
...""",
    "explain": """\
$ prfaas explain 0d31bfddb11eafc2d2e099f9c619fb14
request       0d31bfddb11eafc2d2e099f9c619fb14: completion for mimo-v2-tiny, 16 s ago
outcome       answered (HTTP 200)
route         prefill cluster prefill-a (above_threshold)
...
sent          9.8 MiB in 0.438 s, 100% of it before the prefill ended
...""",
    "link top": """\
$ prfaas link top --once
link               state        now  available  seen  used    rtt  loss  lately
------------------------------------------------------------------------------------
prefill-a-to-pd-b  clear  217.2kbit    598Mbit   1 s    0%  150us        ·▁▂▁▁▁▂▁···""",
    "health": """\
$ prfaas health http://127.0.0.1:8000/readyz
ok""",
    "role ls": """\
$ prfaas role ls
instance    role     state  epoch  requests
-------------------------------------------
b1-prefill  prefill  ready      0         0
b1-decode   decode   ready      0         0""",
    "role set": """\
$ prfaas role set b1-decode prefill
http://127.0.0.1:8000 answered 409: b1-decode stays decode: pd-b has 1 usable decode
instances; one must stay.""",
    "instance add": """\
$ prfaas instance add p9 --cluster east --url http://10.0.1.9:7400 --agent 10.0.1.9:7101
p9 of east is serving""",
    "instance list": """\
$ prfaas instance list
cluster    instance    node  role     phase    requests
-------------------------------------------------------
pd-b       b1-prefill  b1    prefill  serving         0
pd-b       b1-decode   b1    decode   serving         0
prefill-a  a1-prefill  a1    prefill  serving         0""",
    "instance remove": """\
$ prfaas instance remove b1-decode
http://127.0.0.1:8000 answered 409: b1-decode is the last usable instance that decodes for demo.""",
    "gateways": """\
$ prfaas gateways
gateway       state              requests
-----------------------------------------
pd-a          joined for 62 min
pd-b (leads)  joined                   12""",
    "region check": """\
$ prfaas region check region.yaml
region.yaml is right: region two-hosts, clusters prefill-a (prefill), pd-b (pd), 2 engines""",
    "region diff": """\
$ prfaas region diff region.yaml new.yaml
restart gateway (gateway, node b1): gateway.threshold_tokens""",
    "region reload": """\
$ prfaas region reload demo.yaml
the gateway gets: nothing new""",
    "region render": """\
$ prfaas region render region.yaml --systemd units
host 10.0.0.1: copy units/a1/config/. to /etc/prfaas/two-hosts, ...
host 10.0.1.1: copy units/b1/config/. to /etc/prfaas/two-hosts, ...
then: systemctl daemon-reload && systemctl enable --now prfaas-two-hosts.target""",
    "region schema": """\
$ prfaas region schema
{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
...""",
    "certs add": """\
$ prfaas certs add keys region.yaml --renew
copy keys/a1/ to the host 10.0.0.1 (a1)
copy keys/b1/ to the host 10.0.1.1 (b1, with the gateway)""",
    "certs init": """\
$ prfaas certs init keys region.yaml
copy keys/a1/ to the host 10.0.0.1 (a1)
copy keys/b1/ to the host 10.0.1.1 (b1, with the gateway)
keep keys/ca.key where no host of the region reads it
...""",
    "gateway": """\
$ prfaas gateway --config gateway.yaml
{"event": "ready", "url": "http://127.0.0.1:8000", "pid": 23374}""",
    "prefill": """\
$ prfaas prefill --config prefill-a.yaml
{"event": "ready", "front": "prefill-a", "control": "127.0.0.1:7201", "pid": 23381}""",
    "pd": """\
$ prfaas pd --config pd-b.yaml
{"event": "ready", "front": "pd-b", "control": "127.0.0.1:7202", "pid": 23390}""",
    "agent": """\
$ prfaas agent --config a1.yaml
...
{"event": "ready", "data": "127.0.0.1:39933", "control": "127.0.0.1:36069", ...}""",
    "directory": """\
$ prfaas directory --listen 127.0.0.1:0 --agent prefill-a/a1=127.0.0.1:7101
{"event": "ready", "control": "127.0.0.1:33573", "pid": 7614}""",
    "plan case-study": """\
$ prfaas plan case-study
                                     paper       here,                   here,
                                    prints  paper mode  difference  exact mode
------------------------------------------------------------------------------
threshold t, tokens                 19,400      19,461       +0.3%      19,686
prefill-cluster instances N_prfaas       4           4           0           4
...""",
    "plan example": """\
$ prfaas plan example
# A plan file: what `prfaas plan solve` and `prfaas plan sweep` read. These are the inputs of the
# case study in the Prefill-as-a-Service paper; those marked "derived" are not printed in it.
...""",
    "plan kv": """\
$ prfaas plan kv config.json --prefill-s 0.1,0.4,1.8,8
MiMoV2FlashForCausalLM, float32, KV float32, 1 rank: 6 of 6 layers have a cache
...
        attention  window  total  prefill     Phi
tokens        MiB     MiB    MiB        s  Gbit/s
-------------------------------------------------
   1Ki        4.0     1.0    5.0     0.10    0.42
...""",
    "plan live": """\
$ prfaas plan live
mode act, every 5 min, next in 5 min
setting                                   now  best
---------------------------------------------------
planned threshold of prefill-a, tokens  1,024
pd-b prefill instances                      1
pd-b decode instances                       1
traffic: 0.75 requests/s, prompts of 2,443 tokens, 2,443 of them uncached (P90 5,058), ...""",
    "plan profile": """\
$ prfaas plan profile --url http://127.0.0.1:8000 --out mine.yaml
...
wrote mine.yaml""",
    "plan profile-live": """\
$ prfaas plan profile-live --instance a1-prefill --out loaded.yaml
...
wrote loaded.yaml""",
    "plan solve": """\
$ prfaas plan solve plan.yaml
3.2 requests/s sustained (exact); 3.27 by the paper's formula (T of the mean length)
...
threshold 19,601 tokens: 49.1% of requests are offloaded, mean 45,266 tokens (paper mode:
threshold 19,352)
home-site: 3 instances prefill, 5 decode
...""",
    "plan sweep": """\
$ prfaas plan sweep plan.yaml --over link_gbps=10,50,100
link         paper  today's           PD  threshold             off-
gbps  exact   mode     plan  loss  alone     tokens  N_p/N_d  loaded
--------------------------------------------------------------------
  10  3.031  3.037    2.637   13%  1.351     25,567      4/4     38%
  50  3.204  3.272    3.204    0%  1.351     19,601      3/5     49%
...""",
    "simulate example": """\
$ prfaas simulate example
# A simulation file: a plan file (see `prfaas plan example`) with a `simulation` key. The region is
# the case study in the Prefill-as-a-Service paper; its link slows down for ten minutes.
...""",
    "simulate recording": """\
$ prfaas simulate recording --recording recorder
2 files, 18120 events, 1640 decisions, 0 fields differ""",
    "simulate run": """\
$ prfaas simulate run sim.yaml
                                 guarded
----------------------------------------
requests/s offered                 2.576
requests/s within the objective    2.336
  share of all                     90.7%
...""",
    "simulate study": """\
$ prfaas simulate study steady --scale 0.1
          virtual     role   ttft
requests    hours  changes  p90_s
---------------------------------
   22092      2.4        0  4.956
met    role changes: 0 (0)""",
    "rehearse": """\
$ prfaas rehearse small.yaml --clients 30 --duration 2min
small: instances 1 in compute-site, 1 + 1 in home-site (prefill + decode); threshold 24,933 ...
                                        plan  simulated    live
 ──────────────────────────────────────────────────────────────
 requests/s answered (plan: at most)   0.781      0.723   0.739
...
 share prefilled remotely              39.3%      50.0%   47.5%
...
pace kept: 582 passes, off by 0.02% (P50) and 0.53% (P99), 0.17% late; machine 42% busy""",
    "emulate fault": """\
$ prfaas emulate fault /tmp/link.sock set --rate 200Mbit
          in  out  on its way  swallowed  flipped  state
--------------------------------------------------------
forward    0    0           0          0        0  fine
backward   0    0           0          0        0  fine""",
    "emulate link": """\
$ prfaas emulate link --to 127.0.0.1:7100 --rate 1Gbit --rtt 20ms --control /tmp/link.sock
{"event": "ready", "listen": "127.0.0.1:35619", "to": "127.0.0.1:7100", ...}""",
    "demo": """\
$ prfaas demo --model mimo-v2-tiny
...
12 of 12 requests passed every check; nothing left behind; report: .demo/report.json""",
    "version": """\
$ prfaas version
0.1.0""",
}
