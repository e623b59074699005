"""The op stream as data, and pure functions from one stream to that of another depth, batch, width or accumulation."""
