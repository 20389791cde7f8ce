"""The vLLM side of the KV manager: the only package that imports vLLM and torch.

`connector.PrfaasConnector` is what vLLM loads (`kv_connector_module_path`); it is a thin facade
over `scheduler.SchedulerSide` and `worker.WorkerSide`, which live in different processes.

Importing it raises ForeignPackagesError if a package of the project is somebody else's.
"""

from prfaas.own_packages import raise_if_foreign

# At import: with somebody else's `transport`, the imports of the connector fail without naming it.
raise_if_foreign()
