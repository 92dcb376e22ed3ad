"""HTTP bodies in, jobs out."""
