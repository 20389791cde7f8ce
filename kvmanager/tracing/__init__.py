"""What our processes record of traced requests, and where it goes. See docs/tracing.md.

`context` reads and writes `traceparent`, `spans` has what a process notes of a request, and
`export`, the only file that needs the extra `traces`, sends it to an OpenTelemetry receiver.
"""
