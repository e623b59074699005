"""The op stream as data, and what makes of one stream that of another depth, batch, width or accumulation."""
