import { defineConfig } from "vite";

// The scheduler serves index.html at /, docs.html at /docs, and everything else below /page/
// (services/scheduler/http/dashboard.py).
export default defineConfig({
  base: "/page/",
  build: {
    outDir: "../services/scheduler/page",
    emptyOutDir: true,
    assetsDir: "",
    assetsInlineLimit: 0,
    target: "es2022",
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 2000,
    rollupOptions: { input: ["index.html", "docs.html"] },
  },
});
