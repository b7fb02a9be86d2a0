"""What the page and the API share: who is let in, where is listened, how much is read.
`guard` looks at every request first, `listening` opens the port and runs the server, `bodies` reads JSON of bounded
size. Imports Starlette, uvicorn, settings and units; board and serving import from here.
"""
