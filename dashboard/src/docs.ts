// The HTTP API as Swagger UI shows it, from this server's /openapi.json; requests carry the key that the page was given.

import SwaggerUI from "swagger-ui-dist/swagger-ui-es-bundle.js";
import "swagger-ui-dist/swagger-ui.css";
import { key } from "./lib/api.ts";

interface Request {
  url: string;
  headers: Record<string, string>;
}

SwaggerUI({
  url: "/openapi.json",
  dom_id: "#api",
  deepLinking: true,
  docExpansion: "list",
  filter: true,
  validatorUrl: null,
  requestInterceptor: (request: Request): Request => {
    if (key() && !request.headers["Authorization"]) request.headers["Authorization"] = `Bearer ${key()}`;
    return request;
  },
});
