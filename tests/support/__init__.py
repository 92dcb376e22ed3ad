"""What tests share: fakes, builders, live servers."""
