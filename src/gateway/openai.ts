/** Answers in the form OpenAI's clients understand. */

type ApiErrorCode =
  | "invalid_api_key"
  | "model_not_found"
  | "invalid_json"
  | "model_required"
  | "request_too_large"
  | "not_found"
  | "method_not_allowed"
  | "no_replica_ready"
  | "not_ready"
  | "request_timeout"
  | "too_many_requests"
  | "upstream_failed"
  | "internal_error";

const TYPES: Readonly<Record<ApiErrorCode, readonly [status: number, type: string]>> = {
  invalid_api_key: [401, "invalid_request_error"],
  model_not_found: [404, "invalid_request_error"],
  invalid_json: [400, "invalid_request_error"],
  model_required: [400, "invalid_request_error"],
  request_too_large: [413, "invalid_request_error"],
  not_found: [404, "invalid_request_error"],
  method_not_allowed: [405, "invalid_request_error"],
  not_ready: [503, "server_error"],
  request_timeout: [408, "invalid_request_error"],
  no_replica_ready: [503, "server_error"],
  too_many_requests: [429, "rate_limit_error"],
  upstream_failed: [502, "server_error"],
  internal_error: [500, "server_error"],
};

/** A refusal on its way to a client. */
export class ApiError extends Error {
  readonly code: ApiErrorCode;
  readonly param: string | null;
  readonly retry_after_s: number | null;
  /** The method that would be right, with `method_not_allowed`. */
  readonly allow: string | null;

  constructor(
    code: ApiErrorCode,
    message: string,
    more: { readonly param?: string; readonly retry_after_s?: number; readonly allow?: string } = {},
  ) {
    super(message);
    this.code = code;
    this.param = more.param ?? null;
    this.retry_after_s = more.retry_after_s ?? null;
    this.allow = more.allow ?? null;
  }

  get status(): number {
    return TYPES[this.code][0];
  }

  /** The document of the error; with the request id, so that a user can name it. */
  document(request_id: string): { error: { message: string; type: string; param: string | null; code: string; request_id: string } } {
    return { error: { message: this.message, type: TYPES[this.code][1], param: this.param, code: this.code, request_id } };
  }

  toResponse(request_id: string): Response {
    const headers = new Headers({ "content-type": "application/json", "x-request-id": request_id });
    if (this.retry_after_s !== null) headers.set("retry-after", String(this.retry_after_s));
    if (this.allow !== null) headers.set("allow", this.allow);
    if (this.code === "invalid_api_key") headers.set("www-authenticate", "Bearer");
    return new Response(JSON.stringify(this.document(request_id)), { status: this.status, headers });
  }

  /** The last event of a stream that broke. */
  toEvent(request_id: string): string {
    return `data: ${JSON.stringify(this.document(request_id))}\n\n`;
  }
}
