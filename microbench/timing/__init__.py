"""Times one call on a device: policies, rotation of operands, graphs, the profiler, telemetry of the device."""
