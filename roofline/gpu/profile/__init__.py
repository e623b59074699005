"""What is known of one GPU and of its host, and the answer to how long a kernel takes, with a deviation. numpy only."""
