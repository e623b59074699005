"""Every file format and every command against files that were damaged: `mutate` damages a real file, `corpus` says
which files there are and which commands read them, `outcome` runs a command and judges what it left."""
