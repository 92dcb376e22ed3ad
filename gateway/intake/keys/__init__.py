"""API keys: the permissions of each key (`api_key.ApiKey`), the file that stores them
(`key_file.KeyFile`), and the keys that a gateway accepts (`accepted.Keys`)."""
