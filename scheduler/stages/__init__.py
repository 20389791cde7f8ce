"""Encode, prefill and decode of multimodal requests on instances: arrangements and their goodput.

`profile` says how long a pass of an instance takes, `arrangement` which instances run which stages,
`capacity` what bounds each division of the instances. `simulation` plays requests in virtual time,
and `goodput` searches the highest rate that keeps the objectives. After Dong et al., *HydraInfer:
Hybrid Disaggregated Scheduling for Multimodal Large Language Model Serving*.
"""
