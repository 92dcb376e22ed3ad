"""What logs tell, in the words of each endpoint."""
