// A browser starts no worker from a file: this runs a worker's script in a hidden frame, so that the search works.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.heard = event => {
        if (event.source === this.frame.contentWindow && this.onmessage) this.onmessage(event);
      };
      addEventListener("message", this.heard);
      this.ready = new Promise(resolve => { this.frame.onload = resolve; });
      const script = new URL(url, location).href.replace(/[&"<>]/g, character => `&#${character.charCodeAt(0)};`);
      this.frame.srcdoc = `<script>self.postMessage = data => parent.postMessage(data, "*");</script>
        <script src="${script}"></script>`;
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow?.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      removeEventListener("message", this.heard);
      this.frame.remove();
    }
  };
}
