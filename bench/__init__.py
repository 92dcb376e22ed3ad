"""Every figure that the README quotes comes out of a command in here."""
