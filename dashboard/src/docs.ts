// The HTTP API as Swagger UI shows it, from this server's /openapi.json; requests are those of the page's session.

import SwaggerUI from "swagger-ui-dist/swagger-ui-es-bundle.js";
import "swagger-ui-dist/swagger-ui.css";
import "./docs.css";
import { credentials, login } from "./lib/api.ts";

interface Request {
  url: string;
  method?: string;
  headers: Record<string, string>;
}

await login().catch(() => null); // without a session, /openapi.json says how to sign in
SwaggerUI({
  url: "/openapi.json",
  dom_id: "#api",
  deepLinking: true,
  docExpansion: "list",
  filter: true,
  validatorUrl: null,
  requestInterceptor: (request: Request): Request => {
    request.headers = { ...credentials((request.method ?? "GET").toUpperCase()), ...request.headers };
    return request;
  },
});
