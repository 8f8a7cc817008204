"""The HTTP side of the API.

app          the FastAPI application; model names and limits of this server in /openapi.json
routes       the routes, and what /openapi.json says of each
bodies       limits of request bodies, and strict parsing of JSON
connections  limits and time-outs of connections
"""
