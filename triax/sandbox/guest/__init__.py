"""The inside of a virtual machine: its kernel, the agent that is its first process, and the channel to that agent."""
