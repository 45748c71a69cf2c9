"""TRL beside the real vLLM, in the environment of tests/environments/vllm.txt."""
