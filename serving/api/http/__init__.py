"""The HTTP side of the API.

app          the FastAPI application
routes       the routes, and what /openapi.json says of each
bodies       limits of request bodies, and strict parsing of JSON
description  model names and limits of this server in /openapi.json
connections  limits and time-outs of connections
"""
