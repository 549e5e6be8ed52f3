"""What every engine's connector needs, without a word of any engine: who asks the node for a request (`scheduler`),
who moves the bytes (`worker`), what the one tells the other (`plan`), and the fence around both (`fence`)."""
