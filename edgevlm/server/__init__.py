"""The REST service: OpenAI's API over one VLM. FastAPI, uvicorn and pydantic live here alone."""
