"""What goes over one connection: frames, handshake, and both ends of it, without sockets."""
