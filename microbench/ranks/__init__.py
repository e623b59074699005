"""Real steps on several GPUs, a process each: times, memory, and what the GPUs did (`measure`), by torch's launcher
(`worker`)."""
