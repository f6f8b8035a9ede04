// Shows the OpenAPI document that is served with this page.
SwaggerUIBundle({ url: new URL("openapi.json", document.baseURI).href, dom_id: "#operations", deepLinking: true });
