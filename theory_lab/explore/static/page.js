// The page of `theory-lab explore`.

import { mount } from "./explorer.js";
import { httpTransport } from "./transport.js";

await mount(document.querySelector("main"), httpTransport(new URL("./", location.href)));
