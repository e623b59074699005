"""Which profile or host a name means, and profiles kept ready for the next command."""
