// An HTTP server and a client that checks each answer: `http.js server PORT`, `http.js client PORT`.
"use strict";
const http = require("http");
const crypto = require("crypto");
const [role, port] = [process.argv[2], Number(process.argv[3])];

function bytes(seed, length) {
  const out = Buffer.alloc(length);
  for (let i = 0, x = seed + 1; i < length; i++) {
    x = (Math.imul(x, 1103515245) + 12345) >>> 0;
    out[i] = x >>> 16;
  }
  return out;
}

if (role === "server") {
  // Answers the digest of what came, and as many bytes.
  http.createServer((request, response) => {
    const parts = [];
    request.on("data", (part) => parts.push(part));
    request.on("end", () => {
      const body = Buffer.concat(parts);
      response.setHeader("x-digest", crypto.createHash("sha1").update(body).digest("hex"));
      response.end(body);
    });
  }).listen(port, "127.0.0.1");
  process.on("SIGINT", () => process.exit(0));
} else {
  const agent = new http.Agent({ keepAlive: true, maxSockets: 6 });
  let left = 300;
  for (let n = 0; n < 300; n++) {
    const body = bytes(n, n % 50 === 0 ? 700000 : (n * 37) % 5000);
    const request = http.request({ port, host: "127.0.0.1", agent, method: "POST" }, (response) => {
      const parts = [];
      response.on("data", (part) => parts.push(part));
      response.on("end", () => {
        const digest = crypto.createHash("sha1").update(body).digest("hex");
        if (!Buffer.concat(parts).equals(body) || response.headers["x-digest"] !== digest) {
          console.error("answer", n, "differs");
          process.exit(1);
        }
        if (--left === 0) {
          console.log("node: 300 answers");
          agent.destroy();
        }
      });
    });
    request.on("error", (error) => {
      console.error(String(error));
      process.exit(1);
    });
    request.end(body);
  }
}
