"""The vLLM side of the KV manager: the only package that imports vLLM and torch.

`connector.PrfaasConnector` is what vLLM loads (`kv_connector_module_path`); it is a thin facade
over `scheduler.SchedulerSide` and `worker.WorkerSide`, which live in different processes.
"""
