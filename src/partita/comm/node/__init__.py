"""Direct memory reads between ranks of one node: permission, handshake, messages, and sockets in forked children."""
