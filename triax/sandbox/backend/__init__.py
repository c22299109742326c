"""What a sandbox runs on: a virtual machine, a user-space kernel, namespaces, another service, or nothing at all."""
