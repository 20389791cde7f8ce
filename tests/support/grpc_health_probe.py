"""Asks a gRPC server for grpc.health.v1 as a probe does that knows only the published protocol."""

from __future__ import annotations

from typing import Any, Final, Literal

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Status = Literal["UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"]


def _messages() -> tuple[Any, Any]:
    """HealthCheckRequest and HealthCheckResponse, as health.proto of gRPC declares them."""
    file = descriptor_pb2.FileDescriptorProto(
        name="probe_health.proto", package="grpc.health.v1", syntax="proto3"
    )
    asked = file.message_type.add(name="HealthCheckRequest")
    asked.field.add(name="service", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
    answered = file.message_type.add(name="HealthCheckResponse")
    status = answered.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        status.value.add(name=name, number=number)
    kind = ".grpc.health.v1.HealthCheckResponse.ServingStatus"
    answered.field.add(
        name="status", number=1, type="TYPE_ENUM", label="LABEL_OPTIONAL", type_name=kind
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = message_factory.GetMessageClassesForFiles([file.name], pool)
    return made["grpc.health.v1.HealthCheckRequest"], made["grpc.health.v1.HealthCheckResponse"]


_REQUEST, _RESPONSE = _messages()
_CHECK: Final = "/grpc.health.v1.Health/Check"


async def grpc_health(target: str, credentials: Any = None, *, service: str = "") -> Status:
    """The status that the server at `target` says. `credentials` are those of the channel."""
    channel = (
        grpc.aio.insecure_channel(target)
        if credentials is None
        else grpc.aio.secure_channel(target, credentials)
    )
    async with channel:
        check = channel.unary_unary(
            _CHECK,
            request_serializer=_REQUEST.SerializeToString,
            response_deserializer=_RESPONSE.FromString,
        )
        answer = await check(_REQUEST(service=service), timeout=10)
    name: Status = answer.DESCRIPTOR.fields_by_name["status"].enum_type.values[answer.status].name
    return name
