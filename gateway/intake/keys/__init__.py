"""API keys: what each permits (`api_key.ApiKey`), the file that stores them (`key_file.KeyFile`),
and the ones that a gateway accepts (`accepted.Keys`)."""
