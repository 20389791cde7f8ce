"""The OpenAPI document of a gateway: a description of each route, and the document made of them."""
