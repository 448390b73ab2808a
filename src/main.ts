console.log("llmgw");
