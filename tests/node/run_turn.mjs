// A client of HarnessService without generated code: node run_turn.mjs TARGET REQUEST
// runs the turn that the JSON text REQUEST describes and prints each event as a line of JSON until `done`.
// Exit code 0: the turn was told to its end; 1: the call failed; 2: it ended without `done`.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const TURN_SECONDS = 60;
const protos = fileURLToPath(new URL("../../protos", import.meta.url));
const definition = loadSync("turnfence/harness/v1/harness.proto", {
  includeDirs: [protos],
  keepCase: true,
  enums: String,
  longs: String,
  oneofs: true,
});
const { HarnessService } = grpc.loadPackageDefinition(definition).turnfence.harness.v1;

const [target, request] = process.argv.slice(2);
const client = new HarnessService(target, grpc.credentials.createInsecure());
const deadline = new Date(Date.now() + TURN_SECONDS * 1000);
const call = client.RunTurn(JSON.parse(request), { deadline });
let done = false;

call.on("data", ({ events }) => {
  for (const { sequence, run_id, kind, ...rest } of events) {
    done ||= kind === "done";
    console.log(JSON.stringify({ kind, sequence, run_id, [kind]: rest[kind] }));
  }
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
  client.close();
});
call.on("end", () => {
  process.exitCode ??= done ? 0 : 2;
  client.close();
});
