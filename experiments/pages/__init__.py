"""Parts of the report and of the pages: HTML, pictures, templates."""
